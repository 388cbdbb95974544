"""Jobs on many machines: Dask places them, the database holds the truth.

A task of Dask says "run the job of this id now" and no more. The worker that gets it takes the
lease of the job's row, as every worker does, so that a job that is placed twice runs once.
"""
