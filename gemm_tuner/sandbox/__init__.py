"""Shut compilers and trials off from the machine that they run on."""
