"""Bundles: kernels with what C and C++ programs need to call them, in one folder."""
