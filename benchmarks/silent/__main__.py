"""``python -m benchmarks.silent PROGRAM [--bug]``: one program on this process, as torchrun or Python started it."""

import argparse
import os

import torch.distributed as dist

from benchmarks.silent.frame import start
from benchmarks.silent.trial import programs

PROGRAMS = {program.name: program for _, program in programs()}
parser = argparse.ArgumentParser(prog="python -m benchmarks.silent")
parser.add_argument("name", choices=sorted(PROGRAMS))
parser.add_argument("--bug", action="store_true", help="with its bug")
given = parser.parse_args()
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
start(PROGRAMS[given.name], given.bug)
if dist.is_initialized():
    dist.destroy_process_group()
