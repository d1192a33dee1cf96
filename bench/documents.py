"""A file of many jobs: loaded, validated and typed, against PyYAML's C loader alone. Goal: at most 0.35 of its time.

    python bench/documents.py [--jobs 10000] [--runs 5]

Both read the same bytes in turn, in one process; the median of each counts.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpulayer.spec import documents, identity, jobs, schemas  # noqa: E402

GOAL = 0.35


def document(count):
    """Jobs of a sweep, some thirty lines each, as a script that writes them would."""
    chance = random.Random(7)
    entries = {}
    for nth in range(count):
        rate, seed = f"{chance.uniform(1e-4, 1e-2):.6f}", str(nth)
        entries[f"sweep-{nth}"] = {
            "accelerator": chance.choice(["cuda", "mps", ["cuda", "mps"], "cuda"]),
            "framework": "torch",
            "command": ["python3", "train.py", "--lr", rate, "--seed", seed],
            "workdir": chance.choice(["code/vision", "code/text"]),
            "env": {"WANDB_MODE": "offline", "OMP_NUM_THREADS": chance.choice("124"), "RUN": f"r{nth}"},
            "resources": {
                "gpus": 1,
                "gpu_memory_gb": chance.choice([8, 16, 24, 80]),
                "gpu_memory_kind": chance.choice(["dedicated", "unified"]),
                "cpus": chance.choice([1, 4, 8, 16]),
                "memory_gb": chance.choice([8, 32, 64]),
                "dtypes": ["float32", "bfloat16"],
            },
            "where": {"labels": {"team": chance.choice(["language", "vision"]), "site": f"s{nth % 5}"}},
            "retries": chance.randrange(3),
            "timeout": chance.choice(["6h", "30m", "3600s"]),
            "outputs": ["out/model.pt", "out/*.log"],
        }
    return yaml.dump(
        {"version": 1, "name": "sweep", "jobs": entries}, Dumper=yaml.CSafeDumper, sort_keys=False
    ).encode()


def timed(work):
    gc.collect()
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    data = document(args.jobs)
    lines = data.count(b"\n")
    print(f"{args.jobs:,} jobs, {len(data) / 1e6:.1f} MB, {lines:,} lines")
    rival, ours, parts = [], [], {"parse": [], "validate": [], "keys": [], "shapes": []}
    for _ in range(args.runs):
        seconds, _value = timed(lambda: yaml.load(data, yaml.CSafeLoader))
        rival.append(seconds)
        del _value
        seconds, job_set = timed(lambda: jobs.parse_jobs(documents.parse(data, "jobs.yaml")))
        ours.append(seconds)
        parts["keys"].append(timed(lambda: [identity.job_key(job, "sweep", None) for job in job_set.jobs.values()])[0])
        parts["shapes"].append(timed(lambda: [identity.shape_of(job) for job in job_set.jobs.values()])[0])
        del job_set
        seconds, parsed = timed(lambda: documents.parse(data, "jobs.yaml"))
        parts["parse"].append(seconds)
        seconds, problems = timed(lambda: schemas.validate(parsed, "jobs"))
        parts["validate"].append(seconds)
        assert not problems
        del parsed
    median = statistics.median
    print(f"yaml.load(..., CSafeLoader)        {median(rival):7.3f} s")
    print(
        f"load, validate and type            {median(ours):7.3f} s   of which parse {median(parts['parse']):.3f}, "
        f"validate {median(parts['validate']):.3f}"
    )
    print(f"job keys {median(parts['keys']):.3f} s, shapes {median(parts['shapes']):.3f} s (not in the sum)")
    ratio = median(ours) / median(rival)
    print(f"ratio {ratio:.3f} (goal <= {GOAL}), runs {min(ours) / max(rival):.3f}..{max(ours) / min(rival):.3f}")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
