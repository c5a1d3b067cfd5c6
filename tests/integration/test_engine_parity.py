"""The engine on real models: its greedy tokens are those of `transformers` in fp32, whatever happens around them.

Each mechanism is proved to have happened by the engine's own counters.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tokenspeed import LLM, SamplingParams
from tokenspeed.cli.main import cli
from tokenspeed.cli.output import unwritable
from tokenspeed.errors import ConfigError, EngineDead, RequestError

NEW_TOKENS = 24
SHARED, OWN = 40, 9


@pytest.fixture(scope="module")
def checkpoint(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Qwen3 with a tokenizer of single bytes; its other ids have no token."""
    folder = tmp_path_factory.mktemp("with-tokenizer")
    for file in tiny_qwen3.iterdir():
        (folder / file.name).symlink_to(file)
    specials = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({piece: i for i, piece in enumerate([*specials, *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def start(checkpoint: Path, **options: Any) -> LLM:
    # One thread: the model is so small that two would mostly wait for each other.
    sizes = {"threads": 1, "max_model_len": 128, "num_kv_pages": 64, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    return LLM(checkpoint, plugins="tokenspeed-reference,tokenspeed-models", **{**sizes, **options})


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with start(checkpoint) as found:
        yield found


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Ragged prompts that share a beginning of two and a half pages."""
    rng = random.Random(11)
    base = [rng.randrange(3, 250) for _ in range(SHARED)]
    return [base + [rng.randrange(3, 250) for _ in range(1 + i % OWN)] for i in range(7)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What `transformers` generates for each prompt alone, greedily, in fp32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.mark.parametrize(
    ("options", "mechanisms"),
    [
        ({"enable_prefix_caching": False}, set()),
        ({"enable_prefix_caching": True, "max_num_seqs": 1}, {"cached_tokens"}),
        ({"enable_prefix_caching": False, "max_num_batched_tokens": 11}, {"chunked_prefills"}),
        ({"enable_prefix_caching": False, "num_kv_pages": 12}, {"preemptions"}),
        ({"num_kv_pages": 8, "max_num_batched_tokens": 16}, {"preemptions", "chunked_prefills", "cached_tokens"}),
    ],
    ids=["plain", "prefix-cache", "chunked", "preempted", "all-at-once"],
)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    options: dict[str, Any],
    mechanisms: set[str],
) -> None:
    with start(checkpoint, **options) as llm:
        outputs = llm.generate(prompts, GREEDY)
        stats = llm.stats()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    counters = ("cached_tokens", "preemptions", "chunked_prefills")
    assert {name for name in counters if getattr(stats, name) > 0} == mechanisms
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


def test_score_is_transformers_log_softmax(llm: LLM, checkpoint: Path, prompts: list[list[int]]) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for score, ids in zip(llm.score(prompts), prompts, strict=True):
        with torch.no_grad():
            table = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        values = table[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        assert score.logprobs[0] is None
        torch.testing.assert_close(torch.tensor(score.logprobs[1:]), values, rtol=1e-5, atol=1e-5)


def test_samples_are_single_requests_with_the_reported_seeds(llm: LLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(n=4, seed=7, max_tokens=12, logprobs=0, ignore_eos=True)
    many = llm.generate(prompts[0], params)[0].outputs
    assert len({tuple(sample.token_ids) for sample in many}) == 4
    assert many[0].seed == 7
    for sample in many:
        single = SamplingParams(seed=sample.seed, max_tokens=12, logprobs=0, ignore_eos=True)
        (again,) = llm.generate(prompts[0], single)[0].outputs
        assert again.token_ids == sample.token_ids


def test_unseeded_samples_differ_and_report_their_seeds(llm: LLM) -> None:
    outputs = llm.generate([[5, 6, 7]] * 4, SamplingParams(n=2, max_tokens=12, ignore_eos=True))
    samples = [sample for output in outputs for sample in output.outputs]
    assert len({sample.seed for sample in samples}) == 8
    assert len({tuple(sample.token_ids) for sample in samples}) == 8


def test_text_grows_to_the_decoded_tokens_and_stops_inside_them(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    whole = llm.generate("some words", params)[0].outputs[0]
    assert whole.text == llm.tokenizer.decode(whole.token_ids)
    stop = whole.text[5:8]
    cut = llm.generate("some words", SamplingParams(seed=3, max_tokens=40, ignore_eos=True, stop=[stop]))[0].outputs[0]
    single: Any = stop  # vLLM takes one string too
    assert cut == llm.generate("some words", msgspec.structs.replace(params, stop=single))[0].outputs[0]
    assert cut.finish_reason == "stop"
    assert cut.stop_reason == stop
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


BAD_TYPES: list[tuple[Any, str]] = [
    ({"max_tokens": 3}, "expected SamplingParams, got dict"),
    (SamplingParams(temperature="1"), r"Expected `float`, got `str` - at `\$\.temperature`"),
    (SamplingParams(stop=[1]), r"at `\$\.stop\[0\]`"),
    (SamplingParams(logit_bias=[1]), r"at `\$\.logit_bias`"),
]


@pytest.mark.parametrize(("params", "message"), BAD_TYPES)
def test_parameters_of_a_wrong_type_are_refused_by_name(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([1, 2], params)


BAD_PROMPTS: list[tuple[Any, str]] = [
    (None, "expected a text, token ids, or a list of either, not NoneType"),
    (5, "not int"),
    ({"prompt": "a"}, "not dict"),
    (b"abc", "not bytes"),
    ([{"prompt_token_ids": [5]}], "a prompt is a text or a list of token ids, not dict"),
    ([b"abc"], "not bytes"),
    ([{5, 6}], "not set"),
    ("\ud800", "half of a surrogate pair"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_what_is_no_prompt_is_refused_and_not_gone_through(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt)


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "a"}, None, ["hello"]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages: "):
        llm.chat(messages)


def test_numbers_and_collections_may_be_of_like_types(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=9, seed=3, temperature=0.5, allowed_token_ids=[5, 9], stop_token_ids=[])
    alike: Any = {"seed": np.int64(3), "temperature": np.float32(0.5), "allowed_token_ids": {5, 9}}
    (expected,), (found,) = (
        llm.generate([1, 2], params)[0].outputs
        for params in (plain, SamplingParams(max_tokens=9, stop_token_ids=None, **alike))
    )
    assert found == expected


def test_one_bad_prompt_refuses_the_call_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="vocabulary"):
        llm.generate([[1, 2], [10**6]], GREEDY)
    assert llm.stats().running == llm.stats().waiting == 0
    assert llm.generate([1, 2], GREEDY)[0].finished


def test_an_interrupted_call_leaves_nothing(llm: LLM, prompts: list[list[int]]) -> None:
    def stop_here(index: int, output: object) -> None:
        raise KeyboardInterrupt

    lengths = [SamplingParams(max_tokens=2 + 9 * (i > 0), ignore_eos=True) for i in range(len(prompts))]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, lengths, on_output=stop_here)
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


def test_misspelt_options_and_closed_engines(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        LLM(checkpoint, max_model_lenn=5)
    llm = start(checkpoint)
    llm.close()
    llm.close()
    with pytest.raises(EngineDead):
        llm.generate([1, 2])


def test_jsonl_round_trip(checkpoint: Path, tmp_path: Path) -> None:
    arguments = [str(checkpoint), "--max-model-len", "128", "--num-kv-pages", "64"]
    arguments += ["--plugins", "tokenspeed-reference,tokenspeed-models"]
    lines = [
        {"prompt": "ab", "max_tokens": 6, "seed": 5, "logprobs": 0, "id": "first", "ignore_eos": True},
        {"prompt": [9, 8, 7], "max_tokens": 3, "temperature": 0, "logit_bias": {"40": 60}, "n": 2},
    ]
    runner = CliRunner()
    result = runner.invoke(cli, ["generate", *arguments], input="\n".join(map(json.dumps, lines)))
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["id"] == "first"
    assert second["outputs"][1]["token_ids"] == [40, 40, 40]
    (sample,) = first["outputs"]
    assert sample["seed"] == 5
    scored = runner.invoke(
        cli, ["score", *arguments], input=json.dumps({"token_ids": first["prompt_token_ids"] + sample["token_ids"]})
    )
    assert scored.exit_code == 0, scored.output
    values = json.loads(scored.stdout)["logprobs"]
    reported = [next(iter(position.values()))["logprob"] for position in sample["logprobs"]]
    assert values[0] is None
    assert values[2:] == pytest.approx(reported, rel=1e-4)
    for bad, message in (
        ({"prompt": "a", "max_tokenz": 1}, "max_tokenz"),
        ({"max_tokens": 1}, "line 2: give `prompt`"),
        ({"prompt": 5}, "line 2: a prompt is a text or a list of token ids, not int"),
        ({"prompt": [5] * 10_000}, "line 2: the prompt has 10000 tokens"),
        ({"prompt": "a", "top_p": 7}, "line 2: top_p: 7.0 is out of range"),
    ):
        refused = runner.invoke(cli, ["generate", *arguments], input=f'{{"prompt": "a"}}\n{json.dumps(bad)}')
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert message in refused.output
    for line, message in (('{"text": ""}', "the prompt has no tokens"), ('{"token_ids": "a"}', "goes into `text`")):
        refused = runner.invoke(cli, ["score", *arguments], input=f'{{"text": "a"}}\n{line}')
        assert refused.exit_code == 1
        assert "line 2: " in refused.output
        assert message in refused.output


def test_bulk_output_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    found = CliRunner().invoke(cli, ["generate", "nowhere", "-o", str(tmp_path / "absent" / "x")], input="")
    assert found.exit_code == 2
    assert "No such file or directory" in found.output


def test_a_run_that_fails_leaves_no_output_and_changes_none(tmp_path: Path) -> None:
    fresh, old = tmp_path / "fresh", tmp_path / "old"
    old.write_text("kept")
    commands = {
        "generate": '{"prompt": "a"}',
        "score": '{"text": "a"}',
        "numerics certify": "",
        "numerics dump --prompts -": '{"prompt": "a"}',
    }
    for command, lines in commands.items():
        for file in (fresh, old):
            found = CliRunner().invoke(cli, [*command.split(), "nowhere", "-o", str(file)], input=lines)
            assert found.exit_code != 0
            assert "nowhere" in found.output
        missing = CliRunner().invoke(cli, [*command.split(), "nowhere", "-o", str(tmp_path / "absent" / "x")])
        assert "No such file or directory" in missing.output
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_text() == "kept"


def test_an_output_pipe_is_left_to_its_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert unwritable(tmp_path / "pipe") is None
    assert unwritable(Path("/dev/null")) is None
    assert unwritable(tmp_path) == "Is a directory"
    assert unwritable(tmp_path / "new" / "x") == "No such file or directory"
    assert unwritable(tmp_path / "new" / "x", makes_folders=True) is None
    assert unwritable(tmp_path / "pipe" / "new" / "x", makes_folders=True) == "Not a directory"
    assert unwritable(tmp_path / ("x" * 300)) == "File name too long"
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_bulk_work_that_fails_is_no_success(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    arguments = ["generate", str(folder), "--plugins", "tokenspeed-reference,tokenspeed-models"]
    found = CliRunner().invoke(cli, arguments, input='{"prompt": "a"}\n{"prompt": "b", "n": 2}')
    assert found.exit_code == 1
    assert "3 of 3 samples failed" in found.output
    assert [len(json.loads(line)["outputs"]) for line in found.stdout.splitlines()] == [1, 2]


def test_bench_prints_its_split(checkpoint: Path) -> None:
    arguments = [
        "bench",
        "throughput",
        str(checkpoint),
        "--null-model",
        "--json",
        "--repeat",
        "1",
        "--batch-size",
        "64",
    ]
    result = CliRunner().invoke(cli, [*arguments, "--plugins", "tokenspeed-reference,tokenspeed-models"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["decode"]
    assert row["batch"] == 64
    # The engine's own cost, with nothing computed: the aim is 1 ms; the bound allows for a busy machine.
    assert 0 < row["step_ms"] < 5
