"""From SGLang's forward passes to rows that are sent to the bridge."""
