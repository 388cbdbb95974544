"""Pictures of figures, by matplotlib, in the colours of the page around them."""
