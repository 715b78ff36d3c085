"""`python -m penstock.cluster.worker`: start a worker that joins a run.

Another name of `penstock.distributed.worker.main`, for job scripts that people have written.
"""

from penstock.distributed.worker.main import main

if __name__ == "__main__":
    main()
