"""What this machine is: CPU, caches, usable features, memory."""
