"""The double of SGLang as a process of its own, which can be killed: python -m support.sglang_server MODEL PORT."""

from __future__ import annotations

import sys

from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.sglang_double import SglangDouble


def main(model: str, port: int) -> None:
    double = SglangDouble(AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model), model, 128)
    web.run_app(double.app(), host="127.0.0.1", port=port, print=lambda *_: None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
