"""Judge a DeepSeek-V3 checkpoint of about 1 GB by `transformers`, then its own bits: `check_deepseek.py FOLDER`.

`transformers` makes and saves the checkpoint (random weights, several files) unless FOLDER holds it already. In fp32
the logits over short and long contexts and the greedy tokens must be transformers'; in its own bf16, under rl-bitwise,
every reply alone must be the reply in a batch, and the reported logprobs the teacher-forced ones, bit for bit.
"""

from __future__ import annotations

import argparse
import importlib.resources
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from tokenspeed import LLM, SamplingParams
from tokenspeed.testing.models import PagedModel, load_model
from tokenspeed_kernels_aok.plugin import tokenspeed_kernels
from tokenspeed_models.deepseek_v3 import DeepseekV3ForCausalLM

CONTEXTS = (1, 33, 300, 1000)
MOST_RELATIVE_ERROR = 1e-5
NEW_TOKENS = 24
PROMPTS = 12

SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 56,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 16384,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

console = Console()


def make(folder: Path) -> None:
    """Save the random checkpoint, with the tokenizer of the model that comes along."""
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SHAPE))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="300MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(str(importlib.resources.files("tokenspeed_models") / "tiny" / name), folder)


def random_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(10, SHAPE["vocab_size"], (count,), generator=generator).tolist()
    return ids


@torch.inference_mode()
def judge(folder: Path) -> list[str]:
    """What differs from transformers in fp32."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_model(DeepseekV3ForCausalLM, folder, dtype=torch.float32, kernels=tokenspeed_kernels())
    faults = []
    for count in CONTEXTS:
        ids = random_ids(count, seed=count)
        expected = theirs(torch.tensor([ids])).logits[0]
        got = PagedModel(ours, num_pages=80).feed({0: ids})[0]
        error = float(((got - expected).abs().amax(-1) / expected.abs().amax(-1)).max())
        console.print(f"context {count}: logits differ by {error:.1e} of the largest one")
        if error > MOST_RELATIVE_ERROR:
            faults.append(f"logits over {count} tokens differ by {error:.1e}")
    prompt = random_ids(300, seed=7)
    reply = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    expected_tokens = reply[0, len(prompt) :].tolist()
    tokens = PagedModel(ours, num_pages=80).generate(0, prompt, len(expected_tokens))
    console.print(f"{len(tokens)} greedy tokens: {'equal' if tokens == expected_tokens else 'different'}")
    return faults + ["greedy tokens differ"] * (tokens != expected_tokens)


def verify(folder: Path) -> list[str]:
    """Where replies under rl-bitwise depend on their company, or differ from the teacher-forced pass."""
    llm = LLM(str(folder), numerics="rl-bitwise", max_model_len=1024, max_num_seqs=PROMPTS)
    prompts = [random_ids(20 + 37 * number, seed=100 + number) for number in range(PROMPTS)]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, seed=3, logprobs=0, ignore_eos=True)

    def replies(batch: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        outputs = [result.outputs[0] for result in llm.generate(batch, params)]
        return [
            (o.token_ids, [p[t].logprob for p, t in zip(o.logprobs or [], o.token_ids, strict=True)]) for o in outputs
        ]

    together = replies(prompts)
    llm.engine.reset_prefix_cache()
    alone = [replies([prompt])[0] for prompt in prompts]
    scores = llm.score(
        [prompt + tokens for prompt, (tokens, _) in zip(prompts, together, strict=True)], temperature=0.8
    )
    forced = [score.logprobs[-NEW_TOKENS:] for score in scores]
    faults = [f"prompt {i}: alone is not as in a batch" for i in range(PROMPTS) if alone[i] != together[i]]
    faults += [f"prompt {i}: teacher-forced logprobs differ" for i in range(PROMPTS) if forced[i] != together[i][1]]
    console.print(f"{PROMPTS} replies of {NEW_TOKENS} tokens, alone, together and teacher-forced: {len(faults)} differ")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the checkpoint, made when it is not there")
    folder: Path = parser.parse_args().folder
    transformers.utils.logging.disable_progress_bar()
    if not (folder / "config.json").exists():
        with console.status("making the checkpoint"):
            make(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    console.print(f"{size / 1e9:.2f} GB in {len(list(folder.glob('*.safetensors')))} files")
    faults = judge(folder)
    faults += verify(folder)
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
