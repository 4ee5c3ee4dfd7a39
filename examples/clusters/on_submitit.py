"""Two workers that submitit starts: by Slurm where there is `srun`, else on this host. Run it in this folder."""

from __future__ import annotations

import hello
import submitit


def main() -> None:
    executor = submitit.AutoExecutor(folder="submitit-logs")
    executor.update_parameters(nodes=1, tasks_per_node=2, timeout_min=5)
    job = executor.submit(hello.main)
    job.results()
    for number in range(2):
        print(job.task(number).stdout())


if __name__ == "__main__":
    main()
