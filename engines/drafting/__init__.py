"""Host-side drafting: proposals from text that is already there, and how long a draft should be."""
