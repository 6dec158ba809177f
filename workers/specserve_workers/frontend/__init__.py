"""What a request passes before it reaches the engine: pure ASGI, no engine import."""
