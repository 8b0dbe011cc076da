"""Imports the trainer once, then forks a process for every run that a line of standard input names.

A line is `[stage, [override, ...]]`; answered are the process id and, when it ended, its exit code.
"""

import json
import os
import sys
import traceback

import torch

from marlhf.config import load_config
from marlhf.stages.ppo import run_ppo
from marlhf.stages.reward import run_reward
from marlhf.stages.sft import run_sft

STAGES = {"sft": run_sft, "reward": run_reward, "ppo": run_ppo}


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        stage, words = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
                STAGES[stage](load_config(None, words))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
