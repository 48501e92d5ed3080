"""The app's look: a theme without anything from the network, and a little CSS for the layout."""

from __future__ import annotations

import gradio as gr

SANS = ["ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]

CSS = """
.gradio-container { max-width: 1760px !important; }
.block.kv-html > .html-container, #title > .html-container { padding: 0; }
#title h1 { margin: 0; font-size: 22px; font-weight: 650; letter-spacing: -0.01em; }
#title p { margin: 2px 0 0; color: var(--body-text-color-subdued); font-size: 14px; line-height: 1.45; }
#paused { align-items: center; padding: 8px 14px; border: 2px solid #b45309; border-radius: 10px; }
#paused p { margin: 0; font-weight: 600; }
.gradio-container { overflow: clip !important; } /* as it clips, nothing in it would stick */
#guide-look p { margin: 0; max-width: 110ch; }
#pool-panel {
  position: sticky; top: 8px; align-self: flex-start; max-height: calc(100vh - 16px); padding-right: 2px;
  overflow-y: auto;
}

/* A reply keeps its line breaks; what it took stands below it in small print, and is nothing to click on. */
#chat .message-content .md { white-space: pre-wrap; overflow-wrap: anywhere; }
#chat .thought { margin: 0; padding: 0; }
#chat .thought-group {
  margin: 6px 0 0; padding: 6px 0 0; border: 0; border-top: 1px solid var(--border-color-primary); border-radius: 0;
  background: none;
}
#chat .thought-group .title { padding: 0; color: var(--body-text-color-subdued); pointer-events: none; }
#chat .thought-group .title .md { font-size: 12px; font-variant-numeric: tabular-nums; }
#chat .thought-group .arrow { display: none; }
#chat .thought-group .content { height: 0; padding: 0; overflow: hidden; }

/* All three beside each other, where there is room at all. */
#memory-maps .kv-maps { grid-template-columns: repeat(auto-fit, minmax(min(200px, 100%), 1fr)); }

/* Above the controls, and before one's eyes while one scrolls through them. */
@media (max-width: 900px) {
  #pool-panel {
    order: -1; top: 0; z-index: 45; max-height: 42vh; padding: 8px 0; background: var(--body-background-fill);
    border-bottom: 1px solid var(--border-color-primary);
  }
}

@media (max-width: 640px) {
  .gradio-container .main.fillable { padding: 10px 12px; }
}
"""


def make_theme() -> gr.themes.Base:
    """Calm colours with enough contrast in both modes, and the fonts that every machine has."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.blue,
        secondary_hue=gr.themes.colors.slate,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_md,
        font=SANS,
        font_mono=MONO,
    ).set(
        body_background_fill="#f8fafc",
        body_background_fill_dark="#0f1420",
        background_fill_primary="#ffffff",
        background_fill_primary_dark="#171d2b",
        background_fill_secondary="#f1f5f9",
        background_fill_secondary_dark="#1e2536",
        border_color_primary="#d5dbe5",
        border_color_primary_dark="#364055",
        body_text_color="#111827",
        body_text_color_dark="#eef2f8",
        body_text_color_subdued="#4b5568",
        body_text_color_subdued_dark="#a9b4c7",
        input_placeholder_color="#5b6678",
        input_placeholder_color_dark="#a9b4c7",
        block_border_width="1px",
        button_primary_background_fill="#1d4ed8",
        button_primary_background_fill_dark="#2f6bf0",
        button_primary_background_fill_hover="#1e40af",
        button_primary_background_fill_hover_dark="#1d4ed8",
        button_primary_text_color="#ffffff",
        button_primary_text_color_dark="#ffffff",
    )
