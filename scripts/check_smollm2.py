"""Serve a SmolLM2 checkpoint under rl-bitwise and judge its chat replies by `transformers`: `check_smollm2.py FOLDER`.

Two engines round differently, so greedy replies may part where two tokens are almost equally likely. Each token that
the server chose must therefore be within `GREATEST_GAP` of the best one in transformers' fp32 logits, and the facts
asked for must be in the text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# Answers that the 4-bit weights give with a clear margin; where the fact is empty only the tokens are judged.
QUESTIONS = {
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Germany?": "Berlin",
    "What is 7+5?": "12",
    "What is the opposite of hot?": "cold",
    "What is the chemical symbol of water?": "H2O",
    "Write one sentence about a river.": "",
}
GREATEST_GAP = 0.5  # in logits, whose spread is about 40; bf16 activations move them by up to 0.2
PORT = 8731
START_TIMEOUT_SECONDS = 120


def post(path: str, body: dict[str, Any]) -> Any:
    """POST `body` as JSON to the server and return the decoded reply."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def wait_until_healthy(server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise SystemExit(f"the server was not healthy after {START_TIMEOUT_SECONDS} s")


def ask(folder: str) -> dict[str, str]:
    """The server's greedy reply to every question."""
    command = [sys.executable, "-m", "tokenspeed", "serve", folder, "--numerics", "rl-bitwise", "--port", str(PORT)]
    server = subprocess.Popen(command)
    try:
        wait_until_healthy(server)
        replies = {}
        for question in QUESTIONS:
            body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 40}
            replies[question] = post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        return replies
    finally:
        server.terminate()
        server.wait(30)


@torch.inference_mode()
def greatest_gap(model: Any, tokenizer: Any, question: str, reply: str) -> float:
    """How far, in logits, the worst token of `reply` lies below the best token at its place."""
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    answer = tokenizer(reply, add_special_tokens=False).input_ids
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="the converted checkpoint")
    folder = parser.parse_args().folder
    replies = ask(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    failed = False
    for question, fact in QUESTIONS.items():
        gap = greatest_gap(model, tokenizer, question, replies[question])
        good = fact in replies[question] and gap <= GREATEST_GAP
        failed |= not good
        print(f"{'ok    ' if good else 'FAILED'} gap {gap:.3f}  {question}  {replies[question]!r}")
    if failed:
        raise SystemExit("SmolLM2's replies are not those of transformers")


if __name__ == "__main__":
    main()
