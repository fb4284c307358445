"""HTTP/2 and gRPC as far as one peer needs them, Envoy: RFC 9113, RFC 7541, and gRPC's framing over them."""
