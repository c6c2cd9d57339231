import { defineConfig } from "vite";

// Relative addresses work below a proxy's prefix; the page's policy allows no data: addresses.
export default defineConfig({
  base: "./",
  build: { assetsInlineLimit: 0, emptyOutDir: true, modulePreload: { polyfill: false }, target: "es2022" },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
});
