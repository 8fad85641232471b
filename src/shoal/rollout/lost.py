"""How asking a server can fail: nobody answered in one way or another, or the answer is no. Raised by link.py."""

from __future__ import annotations

from shoal.errors import EngineError


class Lost(Exception):
    """Nobody answered, or the answer broke off. Says why."""


class Absent(Lost):
    """Nothing listens at the address, or there is no way to it."""


class Loading(Absent):
    """Nothing listens yet, as at every start: nothing to tell, unless something else was told before."""


class Unreachable(Absent):
    """There is no way to the address, whoever may listen there."""


class Late(Lost):
    """Somebody is there, or was, and has not answered in time."""


class Foreign(EngineError):
    """What answers is not the server that is looked for."""


class Busy(Lost):
    """Somebody is there and says: later."""


class Refused(EngineError):
    """The server answered, and the answer is no; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
