"""Whatever is wrong with a command line or a file is said in one line."""
from __future__ import annotations

import os
from typing import Any, Dict

import pytest

from whale_tf.cli import called

pytestmark = pytest.mark.once
SIMULATE, PLAN = "simulate --cluster hc1 --global-batch 8 ", "plan --cluster hc1 --global-batch 8 --model mlp "
COMPARE = "compare --cluster hc1 --global-batch 8 --model mlp "
FILES: Dict[str, bytes] = {
    "latin.json": '{"name": "é"}'.encode("latin-1"), "binary.json": bytes(range(256)), "empty.json": b"", "list.json": b"[1]",
    "cut.json": b'{"version": 1, ', "number.json": b"7", "null.json": b"null", "deep.json": b"[" * 100_000, "text.json": b"hello",
    "keys.json": b'{"colour": "red"}', "nan.json": b'{"version": NaN}', "wide.json": "{}".encode("utf-16"),
    "twice.json": b'{"name": "a", "name": "b"}'}
READ_BY = ("simulate --model mlp --cluster {}", "simulate --plan {} --cluster hc1", "simulate --profile {} --cluster hc1",
           "simulate --model mlp --cluster hc1 --laws {}", "simulate --model mlp --cluster hc1 --calibration {}",
           "plan --profile {} --cluster hc1 --global-batch 8", "explain {}", "compare {} --cluster hc1 --global-batch 8",
           "estimate gpt2 --prices {}")
OPTIONS = [
    "", "simulat", "simulate", "simulate --bogus", "plan", "explain", "diff one.json",
    *(SIMULATE + one for one in (
        "--model mlp --dp x", "--model mlp --dp 0", "--model mlp --dp -1", "--model mlp --dp 1.5", "--model mlp --dp 99999999999",
        "--model mlp --tp 0", "--model mlp --pp 9", "--model mlp --pp 0", "--model mlp --micro-batches 100000",
        "--model mlp --micro-batches 0", "--model mlp --micro-batches 3", "--model gpt2 --tp 8", "--model gpt-1.5b --tp 2",
        "--model mlp --schedule fast", "--model mlp --policy PC", "--model mlp --recompute some", "--model mlp --zero v9 --dp 2",
        "--model mlp --offload disk", "--model mlp --memory-limit 0", "--model mlp --memory-limit nan",
        "--model mlp --precision fp8", "--model mlp --gradients fp8", "--model mlp --seq 128", "--model gpt2 --seq 0",
        "--model gpt2 --seq -5", "--model gpt2 --seq 99999999", "--model gpt3", "--model GPT2",
        "--model bert-0", "--model bert-999999", "--model bert-",
        "--model gpt:", "--model gpt:layers", "--model gpt:layers=", "--model gpt:layers=0", "--model gpt:layers=-1",
        "--model gpt:layers=x", "--model gpt:layers=1.5", "--model gpt:layers=99999999999999999999", "--model gpt:depth=3",
        "--model gpt:hidden=1000,heads=7", "--model llama:heads=32,kv_heads=5", "--model mlp:layers=3", "--model xlnet-36:seq=3",
        "--model vgg-19@dapple:x=1", "--profile nowhere", "--plan nowhere.json", "--model mlp --profile vgg-19",
        "--model mlp --timeline t.txt", "--model mlp --trace no/t.json", "--model mlp --ops nowhere.json")),
    *(f"simulate --model mlp --cluster {one}" for one in (
        "hc9", "cpu:0", "cpu:-1", "cpu:x", "cpu:99999999999", "V100-32GB:0", "0xV100-32GB:8", "V101:8", "a100:3000000",
        "a100:12", "nowhere.json", "no/where", ",", "cpu:4,,", ":", "V100-32GB:8:8")),
    *(PLAN + one for one in (
        "--search fast", "--search rhino", "--recompute some", "--zero v7", "--offload disk", "--precision fp16",
        "--schedule fast", "--memory-limit -1", "--memory-limit 0.0001", "-o no/p.json", "-o .", "--seq 4",
        "--profile vgg-19", "--global-batch 0", "--global-batch -8", "--global-batch 10000000000", "--global-batch x",
        "--model nowhere.json", "--model dlrm")),
    *(COMPARE + one for one in (
        "2by2", "0x1x1", "1x1x0", "9x1x1", "1x1x1:0", "1x1x1:999999", "99999999x1x1", "1x1x1 nowhere.json")),
    *(f"estimate {one}" for one in (
        "gpt3", "gpt2 --devices V101", "gpt2 --count 0", "gpt2 --count 12", "gpt2 --count 8 --global-batch 12", "mlp --seq 3",
        "gpt2 --devices T4 --global-batch 10000000000", "mlp --devices T4 --tokens 5", "gpt2 --tokens 5 --examples 5",
        "gpt2 --precision fp16", "gpt2 --prices nowhere.json")),
    *(f"run {one} s.py" for one in (
        "--hosts a,,b", "--hosts a:x", "--hosts a:0", "--hosts @a", "--hosts -oProxyCommand=x", "--hosts localhost,b",
        "--hosts a,b --ssh '", "--hosts a --ssh nowhere/ssh", "--ssh rsh", "--workers 0",
        "--cluster cpu:3 --workers 2", "--replicate --auto", "--nodes 2", "--rdzv head", "--rdzv :1", "--rdzv head:x",
        "--rdzv head:1 --hosts a", "--record r.json", "--rdzv head:99999", "--rdzv localhost:1 --nodes 0",
        "--rdzv 203.0.113.1:9 --nodes 2 --rdzv-timeout 0.1")),
    "calibrate -o no/c.json", "calibrate --repeat 0", "calibrate --inter-op x", "diff nowhere.json nowhere.json",
    "explain nowhere.json", "explain --picture p.txt", "explain x.json --most -1"]


def said(arguments: str, capsys: Any) -> str:
    """What a command line that makes no sense is answered."""
    assert called(arguments.split()) != 0
    told = capsys.readouterr()
    assert not told.out and told.err.startswith("error: ") and told.err.count("\n") == 1 and len(told.err) < 1500, told
    return str(told.err)


@pytest.mark.parametrize("arguments", OPTIONS[1:])
def test_options(arguments: str, capsys: Any) -> None:
    said(arguments, capsys)


@pytest.mark.parametrize("name", sorted(FILES))
def test_files(name: str, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with open(name, "wb") as handle:
        handle.write(FILES[name])
    for command in READ_BY:
        assert os.path.basename(name) in said(command.format(name), capsys) or name in ("keys.json", "nan.json")
