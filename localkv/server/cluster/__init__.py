"""Several engines behind one address, on Ray Serve. It needs `localkv[ray]`."""
