"""Generate a kernel package, build its wheel, install it beside ours and serve: `try_template.py DIST ENVIRONMENT`.

`DIST` holds our wheels. Fails when the new kernel is not accepted, not chosen under `auto`, or does not serve.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import urllib.request
import venv
from pathlib import Path

NAME = "tokenspeed-kernels-demo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path)
    parser.add_argument("environment", type=Path)
    arguments = parser.parse_args()
    environment = arguments.environment.absolute()
    venv.create(environment, clear=True, with_pip=True)
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "-c", "constraints.txt", "--find-links", str(arguments.dist)]
    subprocess.run([*pip, "tokenspeed[aok]", "build", "pytest", "pytest-timeout"], check=True)

    # Away from the checkout, so that only what was installed can be found.
    def run(*command: str) -> str:
        return subprocess.run([python, "-m", *command], cwd=environment, text=True, stdout=-1, check=True).stdout

    run("tokenspeed", "plugin", "new", NAME)
    run("build", "--wheel", "--outdir", "wheels", NAME)
    (wheel,) = (environment / "wheels").glob("*.whl")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    print(run("tokenspeed", "plugins"))
    print(run("tokenspeed", "kernels", "verify", "--plugin", NAME))
    print(run("pytest", "-q", f"{NAME}/tests"))
    needs = json.loads(run("tokenspeed", "explain", "tiny", "--json"))["operators"]
    chosen = {need["operator"]: need["kernel"] for need in needs}
    if chosen["norm.rms"] != "demo.norm.rms":
        raise SystemExit(f"norm.rms is served by {chosen['norm.rms']}, not by the new kernel")
    serve(python, environment)
    print("the template works")


def serve(python: str, folder: Path) -> None:
    """Start a server and complete one prompt."""
    command = [python, "-m", "tokenspeed", "serve", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            shown = []
            for line in server.stdout:
                shown.append(line)
                if address := re.search(r"serving on (http://\S+)", line):
                    break
            else:
                raise SystemExit("the server did not start:\n" + "".join(shown))
            body = json.dumps({"prompt": "12+34=", "max_tokens": 8, "temperature": 0}).encode()
            request = urllib.request.Request(f"{address[1]}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as reply:
                print(json.load(reply)["choices"][0])
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
