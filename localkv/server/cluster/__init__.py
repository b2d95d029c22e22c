"""Several engines that share one address, on Ray Serve. It needs `localkv[ray]`."""
