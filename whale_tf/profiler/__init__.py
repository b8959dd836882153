"""The cost of a model: profiles by layer, and seconds, FLOPs and bytes from them."""
