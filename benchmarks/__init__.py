"""The measurements behind every published figure, and the figures drawn from them."""
