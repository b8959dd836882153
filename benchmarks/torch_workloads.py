"""The models of :mod:`benchmarks.workloads` in PyTorch, with the same parameters and data: DDP, and 1F1B pipelines of two stages.

Gloo carries both, since there are only CPUs.  ``pip install torch`` installs what is needed.
"""

from __future__ import annotations

import os
from typing import Any, Callable, List, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.measure import Result, Spec, main, step_times
from benchmarks.workloads import LEARNING_RATE, WORKLOADS, Workload, initial

HEADS, SEQUENCE, VOCABULARY, LAYERS = 4, 64, 1000, 4


class Part(torch.nn.Module):
    """Layers ``first`` to ``last`` of a model, without ``last`` itself.

    Args:
        name: of the model.
    """

    def __init__(self, name: str, workload: Workload, first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        self._name, self._first, self._last = name, first, last
        kept = {str(layer) for layer in range(first, last)}
        kept |= {key for key in workload.shapes if not key[-1].isdigit() and (first == 0, last == LAYERS)[key == "head"]}
        for key, shape in workload.shapes.items():
            if key in kept or key[-1] in kept:
                self.register_parameter(key, torch.nn.Parameter(torch.tensor(initial(key, shape))))

    def forward(self, x: Any) -> Any:
        if self._name == "encoder" and self._first == 0:
            x = F.one_hot(x.long(), VOCABULARY).float() @ self.tokens + self.positions
        for layer in range(self._first, self._last):
            x = (self._dense if self._name == "mlp" else self._block)(x, layer)
        return x @ self.head if self._last == LAYERS else x

    def _dense(self, x: Any, layer: int) -> Any:
        return torch.relu(x @ self._of(f"kernel_{layer}") + self._of(f"bias_{layer}"))

    def _block(self, x: Any, layer: int) -> Any:
        rows, hidden = x.shape[0], x.shape[-1]
        qkv = _norm(x, self._of(f"gain_a{layer}")) @ self._of(f"qkv_{layer}")
        query, key, value = qkv.view(rows, SEQUENCE, 3, HEADS, hidden // HEADS).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(query @ key.transpose(-1, -2) * (hidden // HEADS) ** -0.5, -1)
        x = x + (weights @ value).transpose(1, 2).reshape(rows, SEQUENCE, hidden) @ self._of(f"out_{layer}")
        return x + torch.relu(_norm(x, self._of(f"gain_f{layer}")) @ self._of(f"up_{layer}")) @ self._of(f"down_{layer}")

    def _of(self, name: str) -> Any:
        return getattr(self, name)


def _norm(x: Any, gain: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * gain


def _loss(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long())


def _join(rank: int, port: int) -> None:
    """Meets the other process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)


def _data(workload: Workload, rank: int) -> Sequence[Any]:
    return [torch.tensor(each) for each in workload.data(workload.batch, rank)]


def data_parallel(model: torch.nn.Module, workload: Workload, rank: int, port: int) -> Callable[[], float]:
    """One step of DistributedDataParallel in two processes."""
    _join(rank, port)
    return training(torch.nn.parallel.DistributedDataParallel(model), *_data(workload, rank))


def training(model: torch.nn.Module, x: Any, labels: Any) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step() -> float:
        optimizer.zero_grad()
        value = _loss(model(x), labels)
        value.backward()
        optimizer.step()
        return float(value.detach())

    return step


def pipeline(name: str, workload: Workload, rank: int, port: int, micro_batches: int) -> Callable[[], float]:
    """One step of two stages, one in each process, under 1F1B; the first process returns no loss."""
    _join(rank, port)
    part = Part(name, workload, rank * LAYERS // 2, (rank + 1) * LAYERS // 2)
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu")), micro_batches, loss_fn=_loss)
    optimizer = torch.optim.SGD(part.parameters(), LEARNING_RATE)
    x, labels = _data(workload, 0)

    def step() -> float:
        optimizer.zero_grad()
        losses: List[Any] = []
        if rank:
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step(x)
        optimizer.step()
        dist.barrier()
        return float(sum(losses).detach() / len(losses)) if losses else float("nan")

    return step


def worker(spec: Spec) -> Result:
    """One of the processes; each has a core of its own."""
    rank, name = spec["rank"], spec["model"]
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    torch.set_num_threads(1)
    workload = WORKLOADS[name]()
    if spec["micro_batches"]:
        step = pipeline(name, workload, rank, spec["port"], spec["micro_batches"])
    elif spec["system"].endswith("DDP"):
        step = data_parallel(Part(name, workload), workload, rank, spec["port"])
    else:
        step = training(Part(name, workload), *_data(workload, rank))
    return step_times(step, spec["steps"])


if __name__ == "__main__":
    main(__file__, worker, lambda console: console.print("benchmarks.processes runs this."))
