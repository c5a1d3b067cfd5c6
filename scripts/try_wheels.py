"""Install `tokenspeed[aok]` from built wheels into a new environment and use it: `try_wheels.py DIST ENVIRONMENT`.

Fails when anything but our own wheels was taken for our names, or when the result cannot generate under rl-bitwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import venv
from pathlib import Path

OURS = ("tokenspeed", "tokenspeed-kernels-aok", "tokenspeed-models")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path)
    parser.add_argument("environment", type=Path)
    arguments = parser.parse_args()
    wheels = {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in arguments.dist.glob("*.whl")}
    if missing := [name for name in (*OURS, "tokenspeed-kernels-flashinfer") if name not in wheels]:
        raise SystemExit(f"no wheel of {', '.join(missing)} in {arguments.dist}")

    venv.create(arguments.environment, clear=True, with_pip=True)
    python = str((arguments.environment / "bin" / "python").absolute())
    report = arguments.environment / "report.json"
    install = ["-c", "constraints.txt", "--find-links", str(arguments.dist), "tokenspeed[aok]"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--report", str(report), *install], check=True)
    taken = {
        item["metadata"]["name"]: item["download_info"]["url"] for item in json.loads(report.read_text())["install"]
    }
    for name in OURS:
        if not taken[name].startswith("file:") or wheels[name].name.split("-")[1] not in taken[name].replace(
            "%21", "!"
        ):
            raise SystemExit(f"{name} was installed from {taken[name]}, not from {wheels[name]}")

    # Away from the checkout, so that only what was installed can be found.
    prompts = '{"prompt": "12+34=", "max_tokens": 8, "temperature": 0}\n'
    generate = [python, "-m", "tokenspeed", "generate", "tiny", "--numerics", "rl-bitwise"]
    done = subprocess.run(generate, input=prompts, cwd=arguments.environment, text=True, capture_output=True)
    print(done.stdout, done.stderr, sep="")
    if done.returncode or "text" not in done.stdout:
        raise SystemExit(f"`tokenspeed generate` ended with status {done.returncode}")
    print("the wheels work")


if __name__ == "__main__":
    main()
