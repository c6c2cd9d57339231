"""Calls from their request to their record: prepared, sampled, recorded, streamed; repeats join them."""
