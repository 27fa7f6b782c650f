"""Anthropic's Messages API as a wire form of chats: pure translation, which cluster/api/openai/messages.py serves."""
