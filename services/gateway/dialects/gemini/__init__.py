"""Gemini's `generateContent` and `streamGenerateContent`: requests, contents, schemas, answers and chunks."""
