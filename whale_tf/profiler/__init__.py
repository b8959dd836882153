"""What a model costs: profiles by layer, and seconds, FLOPs and bytes from them."""
