"""Endpoints and policy objects from a Kubernetes API server: by InferencePool, by selector, by EndpointSlice."""
