"""The tabs of the app, a file each: components, and handlers that call what the modules above do."""
