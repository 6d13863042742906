"""Grade an answer: 1 for the right number, else 0. It runs after the program has ended."""

import json
import os
from pathlib import Path

row = json.loads(Path(os.environ["TINKERMQ_ROW"]).read_text(encoding="utf-8"))
right = Path("answer.txt").read_text(encoding="utf-8").strip() == str(row["answer"])
print(json.dumps({"reward": float(right), "success": right}))
