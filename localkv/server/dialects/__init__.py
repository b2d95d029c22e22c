"""The APIs that clients speak, each a thin layer over `Front`."""
