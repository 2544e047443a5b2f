"""The Mooncake tier: payloads in a pool, their journal in a local directory."""
