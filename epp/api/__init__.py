"""The bodies: reading requests and responses of the inference APIs without changing a byte."""
