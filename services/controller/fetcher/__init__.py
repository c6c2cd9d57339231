"""The fetcher: stands beside an engine and reads versions from the object store into a folder of the engine's node.

Reads the object store alone. Writes its cache. Promises: each version is read once for a node, whatever number of
engines asks; an engine is never given a folder that is half read, or whose files differ from those published.
"""
