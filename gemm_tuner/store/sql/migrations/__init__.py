"""The history of the database schema, run by `gemm_tuner.store.sql.database`."""
