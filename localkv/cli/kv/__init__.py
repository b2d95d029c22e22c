"""The K and V of a model as tables and pictures, for `calibrate` and `show --kv`."""
