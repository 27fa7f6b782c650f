"""How the embedded pair and its heads were trained and measured; the models lie in drafter_service/embedded."""
