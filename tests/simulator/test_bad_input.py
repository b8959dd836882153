"""Whatever is wrong with a command line or a file is said in one line, at once."""
from __future__ import annotations

import json
import os
from typing import Any, Dict, List

import pytest

from whale_tf.cli import called

pytestmark = pytest.mark.once

FILES: Dict[str, bytes] = {
    "other.json": b"\xff\xfe\x00{", "broken.json": b'{"nodes": [', "list.json": b"[1]", "empty.json": b"{}", "none.json": b"",
    "number.json": b'{"graph": 1, "nodes": 2, "devices": 3}', "negative.json": b'{"A100-80GB": -1}',
    "text.json": b'{"T4": "one"}'}
MODELS = ("gpt3", "gpt:", "gpt:layers", "gpt:layers=0", "gpt:layers=x", "gpt:layers=-1", "gpt:layers=9999", "gpt:depth=3",
          "gpt:layers=24,,", "gpt:hidden=1000,heads=7", "llama:kv_heads=5", "bert-0", "bert-x", "bert-base:seq=0",
          "mlp:layers=3", "")
CLUSTERS = ("hc9", "", "V100-32GB:0", "V100-32GB:-1", "V100-32GB:x", "V100-32GB:", "V99:8", "0xV100-32GB:8", "-1xV100-32GB:8",
            "a100:100000000", "99999999xV100-32GB:8", "V100-32GB:8,", "nowhere.json", *FILES)
SIMULATED = ("--dp 0", "--dp -1", "--dp x", "--dp 16", "--tp 0", "--tp 3000", "--pp 0", "--pp 99", "--pp 7",
             "--micro-batches 0", "--micro-batches -3", "--micro-batches 100000", "--global-batch 0", "--global-batch -1",
             "--global-batch 99999999", "--dp 2 --global-batch 3", "--schedule fast", "--policy PX", "--recompute some",
             "--zero v4", "--zero v1", "--offload disk", "--memory-limit 0", "--memory-limit -1", "--memory-limit nan",
             "--trace no/t.json", "--timeline t.txt", "--memory m.pdf", "--report .", "--calibration nowhere.json",
             "--calibration other.json", "--calibration broken.json", "--calibration list.json", "--precision fp8",
             "--gradients fp8", "--seq 4", "--laws nowhere.json", "--laws other.json", "--laws list.json",
             "--laws number.json", "--order best", "--split nothing", "--plan nowhere.json", "--plan other.json",
             "--plan broken.json", "--plan list.json", "--plan empty.json", "--plan number.json", "--plan none.json",
             "--profile vgg-19", "--ops nowhere.json", "--width 3")
PLANNED = ("--search fastest", "--search rhino", "--zero v9", "--offload disk", "--recompute some", "--precision fp8",
           "--schedule fast", "--output no/p.json", "--output .", "--memory-limit 0", "--memory-limit nan", "--seq 4",
           "--profile vgg-19", "--global-batch 0", "--global-batch -4", "--global-batch 99999999", "--global-batch x")
ESTIMATED = ("--devices V99", "--devices ,", "--count 0", "--count 12", "--count 5000", "--global-batch 0", "--precision fp8",
             "--seq 4", "--examples 0", "--examples 5 --tokens 5", "--tokens 1e9", "--epochs -1", "--prices nowhere.json",
             "--prices other.json", "--prices list.json", "--prices negative.json", "--prices text.json", "--devices CPU --xla")
COMPARED = ("2by2", "0x1x1", "2x2x2x2", "999x1x1", "1x1x1:0", "nowhere.json", "-1x1x1", "1x1x1 --global-batch 0",
            "1x1x1 --order best", "1x1x1 --schedule fast", "1x1x1 --split nothing", "")
OTHERS = ("simulate --model mlp", "simulate --cluster hc1", "plan --model mlp --cluster hc1",
          "plan --cluster hc1 --global-batch 8", "plan --model mlp --global-batch 8",
          "plan --model nowhere.py --cluster hc1 --global-batch 8",
          "plan --model nowhere.pb --cluster hc1 --global-batch 8",
          "plan --profile other.json --cluster hc1 --global-batch 8",
          "plan --profile number.json --cluster hc1 --global-batch 8", "compare 1x1x1 --cluster hc1",
          "compare 1x1x1 --model mlp", "explain", "explain nowhere.json", "explain other.json", "explain list.json",
          "explain empty.json --lowered", "explain empty.json --picture p.svg", "explain empty.json --most -1",
          "diff nowhere.json other.json", "diff other.json", "estimate", "estimate gpt3", "estimate nowhere.py", "predict",
          "simulate --plan number.json --ops list.json --cluster hc1")


def commands() -> List[List[str]]:
    found = [["simulate", "--model", model, "--cluster", "hc1"] for model in MODELS]
    found += [["simulate", "--model", "mlp", "--cluster", cluster] for cluster in CLUSTERS]
    found += [["simulate", "--model", "mlp", "--cluster", "hc1", *options.split()] for options in SIMULATED]
    found += [["plan", "--model", "mlp", "--cluster", "hc1", "--global-batch", "8", *options.split()] for options in PLANNED]
    found += [["estimate", "resnet-50", *options.split()] for options in ESTIMATED]
    found += [["compare", "--model", "mlp", "--cluster", "hc1", "--global-batch", "8", *options.split()] for options in COMPARED]
    return found + [options.split() for options in OTHERS]


def test_one_line(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    asked, wrong = commands(), []
    assert len(asked) > 150 and len(set(map(json.dumps, asked))) == len(asked)
    for arguments in asked:
        status, shown = called(arguments), capsys.readouterr()
        lines = shown.err.strip().splitlines()
        if not status or shown.out or len(lines) != 1 or not lines[0].startswith("error: ") or len(lines[0]) < 20:
            wrong.append(f"{' '.join(arguments)}: {status}, {shown}")
    assert not wrong, "\n".join(wrong)
    assert set(os.listdir(".")) == set(FILES), "nothing is written"
