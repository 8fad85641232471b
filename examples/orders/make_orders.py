import json
import random

NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "eight": 8, "ten": 10, "a dozen": 12, "twenty": 20}
PHRASES = [
    "Please send us {n} {item}.",
    "We need {n} {item} by Friday.",
    "Could I order {n} {item}?",
    "Hi, {n} {item} for the Berlin office, thanks!",
    "Add {n} {item} to my last order.",
    "Our school would like {n} {item}.",
]
ITEMS = "blue folders,desk lamps,red pens,paper towels,phone cases,wall clocks,coffee mugs,garden chairs".split(",")
HELD_OUT = "wool blankets,bike helmets,water bottles,door handles".split(",")

random.seed(0)
with open("orders.jsonl", "w") as file:
    for items, rows in ((ITEMS, 240), (HELD_OUT, 60)):
        for _ in range(rows):
            item, number = random.choice(items), random.choice([*NUMBERS, "7", "15", "30", "48"])
            order = random.choice(PHRASES).format(n=number, item=item)
            quantity = NUMBERS.get(number) or int(number)
            file.write(json.dumps({"order": order, "item": item, "quantity": quantity}) + "\n")
