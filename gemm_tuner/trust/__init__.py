"""Trust: signed verdicts, checked before anything they name is fetched or loaded."""
