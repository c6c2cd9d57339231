"""The Responses API: its requests, answers, events and items, and the routes of what it stores."""
