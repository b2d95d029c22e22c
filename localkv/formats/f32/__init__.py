"""f32: IEEE single precision, 4 bytes a value."""
