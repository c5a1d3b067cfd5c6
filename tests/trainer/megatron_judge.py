"""Megatron-core's own cross entropy over given logits, on as many processes as asked for. Run as a script:

    python megatron_judge.py IN.safetensors FOLDER MODE…

IN holds pairs NAME.logits [R,V], NAME.ids int64[R]. For each mode a file of that name in FOLDER gets NAME float32[R],
the log-probabilities. Mode `2` is two processes, whose sums gloo adds; `2-fold` is one process that goes through
Megatron's steps for every shard and adds the shards' sums in the order of the ranks. The vocabulary is padded with -inf
as Megatron pads it, to the same multiple of 128 on every rank. Knows nothing of tokenspeed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from safetensors.torch import load_file, save_file


def judge(rank: int, ranks: int, meeting: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One process of `ranks`."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    found = {}
    for name, logits, ids in cases(tensors, ranks):
        # Megatron's layout is [sequence, batch, vocabulary].
        shard = logits.chunk(ranks, dim=-1)[rank].unsqueeze(1).contiguous()
        found[name] = -vocab_parallel_cross_entropy(shard, ids.unsqueeze(1)).squeeze(1)
    torch.distributed.destroy_process_group()
    return found


def fold(ranks: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every rank's part in this process, one after another."""
    found = {}
    for name, logits, ids in cases(tensors, ranks):
        wide = logits.float()
        most, width = wide.amax(-1), wide.shape[1] // ranks
        predicted, total = torch.zeros(len(ids)), torch.zeros(len(ids))
        for rank, shard in enumerate(wide.chunk(ranks, dim=-1)):
            _, _, own, sums, _ = VocabParallelCrossEntropy.calculate_predicted_logits(
                shard.contiguous(), ids, most, rank * width, (rank + 1) * width
            )
            predicted, total = predicted + own, total + sums
        found[name] = -(torch.log(total) - predicted)
    return found


def cases(tensors: dict[str, torch.Tensor], ranks: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, logits padded for `ranks`, and ids of each pair, in one order everywhere."""
    for name in sorted(key.removesuffix(".logits") for key in tensors if key.endswith(".logits")):
        logits = tensors[f"{name}.logits"]
        padding = -logits.shape[1] % (128 * ranks)
        yield name, torch.nn.functional.pad(logits, (0, padding), value=-torch.inf), tensors[f"{name}.ids"]


def processes(ranks: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A process for each rank; what the first one computes."""
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                found = judge(rank, ranks, f"{folder}/meeting", tensors)
                if rank == 0:
                    save_file(found, f"{folder}/out")
                os._exit(0)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit("a rank failed")
        return load_file(f"{folder}/out")


def main(source: str, folder: str, modes: list[str]) -> None:
    torch.set_num_threads(1)
    tensors = load_file(source)
    for mode in modes:
        ranks, _, folded = mode.partition("-")
        found = fold(int(ranks), tensors) if folded else processes(int(ranks), tensors)
        save_file(found, f"{folder}/{mode}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
