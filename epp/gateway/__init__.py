"""The edge to Envoy: HTTP/2, gRPC framing, the ext_proc stream machine, servers, TLS and health."""
