import json
import re
from pathlib import Path

from shoal.envs import SingleTurn, answer_of, ask

ROWS = [json.loads(line) for line in Path("orders.jsonl").read_text().splitlines()]


class Orders(SingleTurn):
    def tasks(self, split):
        rows = ROWS[:240] if split == "train" else ROWS[240:]
        return [
            ask(f"{row['order']} How many {row['item']} is that? Answer with a number only.", **row) for row in rows
        ]

    def reward(self, task, messages):
        answer = answer_of(messages)
        right = re.findall(r"\d+", answer)[-1:] == [str(task.data["quantity"])]
        return right / max(len(answer.split()), 1)  # 1 for the number alone, less for every further word
