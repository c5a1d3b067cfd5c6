"""PTX text to a program: parameters, register classes and basic blocks of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s.*?(\w+_param_\d+)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%?\w+)(?:<\d+>)?\s*;")
_LABEL = re.compile(r"([\w$]+):")
_INSTRUCTION = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*);")

_DEBUG_LABEL = "$L__tmp"
BARRIERS = ("bar.sync", "barrier.sync")
_ENDS_BLOCK = ("bra", "bra.uni", "ret", *BARRIERS)


@dataclass(frozen=True)
class Instruction:
    """`@!guard opcode operands`; an operand is a register, a number, `[address]` or `{a,b}`, without blanks."""

    opcode: str
    operands: tuple[str, ...]
    guard: str = ""
    is_negated: bool = False

    @property
    def ends_block(self) -> bool:
        """Threads may part, end or wait here."""
        return self.opcode in _ENDS_BLOCK


@dataclass
class Program:
    """One kernel. `params` are the types of its parameters; `registers` maps a prefix (`%r`) or a name to its class."""

    params: list[str] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])
    labels: dict[str, int] = field(default_factory=dict)

    def opcodes(self) -> set[str]:
        """Every opcode that occurs."""
        return {instruction.opcode for block in self.blocks for instruction in block}

    def class_of(self, register: str) -> str | None:
        """`pred`, `b16`, `b32` or `b64`; None for what is no register."""
        return self.registers.get(register) or self.registers.get(register.rstrip("0123456789"))


def parse(ptx: str) -> Program:
    """Read one kernel. Raises ValueError for a line that cannot be read."""
    program = Program()
    scopes: list[int] = []  # an inline assembly has labels of its own between braces
    opened = 0
    for number, raw in enumerate(ptx.splitlines(), 1):
        line = raw.split("//")[0].strip()
        if line.startswith("$L__func_end"):
            break
        if line == "{":
            opened += 1
            scopes.append(opened)
        elif line == "}":
            scopes.pop()
        elif not scopes:
            if match := _PARAM.match(line):
                program.params.append(match.group(1))
        elif match := _REGISTERS.match(line):
            program.registers[match.group(2)] = match.group(1)
        elif match := _LABEL.fullmatch(line):
            if line.startswith(_DEBUG_LABEL):
                continue
            if program.blocks[-1]:
                program.blocks.append([])
            program.labels[_scoped(match.group(1), scopes)] = len(program.blocks) - 1
        elif line and not line.startswith("."):
            match = _INSTRUCTION.fullmatch(line)
            if match is None:
                raise ValueError(f"line {number} cannot be read: {line!r}")
            negated, guard, opcode, rest = match.groups()
            operands = _split(rest)
            if opcode.startswith("bra"):
                operands = (_scoped(operands[0], scopes),)
            instruction = Instruction(opcode, operands, guard or "", bool(negated))
            program.blocks[-1].append(instruction)
            if instruction.ends_block:
                program.blocks.append([])
    return program


def _scoped(label: str, scopes: list[int]) -> str:
    return label if label.startswith("$") else f"{label}@{scopes[-1]}"


def _split(text: str) -> tuple[str, ...]:
    """Operands at the top level of brackets, without blanks."""
    operands, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            operands.append(current)
            current = ""
        elif not character.isspace():
            current += character
    return (*operands, current) if current else tuple(operands)
