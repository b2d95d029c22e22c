"""The operations of the forward pass, one file each: the plain reference first, then each
backend's own version; and the tables that make backends of them."""
