"""What `torch.compile` and AOTInductor compile: a pass over the graph of Inductor."""
