"""From a problem and a candidate to C++."""
