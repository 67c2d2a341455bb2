" localspec: suggestions as ghost text, questions and edits, over the daemon's Unix socket.
if exists('g:loaded_localspec') || !(has('nvim-0.7') || has('patch-9.0.0185') && has('channel') && has('textprop'))
  finish
endif
let g:loaded_localspec = 1

highlight default LocalspecGhost ctermfg=8 guifg=#808080
highlight default link LocalspecOld DiffDelete
highlight default link LocalspecNew DiffAdd

command! -range -nargs=+ -complete=customlist,localspec#words Localspec
      \ call localspec#command(<range>, <line1>, <line2>, <q-args>)

augroup localspec
  autocmd!
  " Insert mode has not begun yet at the first.
  autocmd InsertEnter * call timer_start(0, {_ -> localspec#typed()})
  autocmd TextChangedI,CursorMovedI * call localspec#typed()
  autocmd TextChangedP,BufLeave * call localspec#stop()
  " InsertLeave does not come with <C-c>.
  autocmd ModeChanged i*:[^i]* call localspec#stop()
  autocmd ModeChanged i*:n call localspec#changed()
  autocmd TextChanged * call localspec#changed()
  autocmd BufReadPost * call localspec#noted(1)
  autocmd BufEnter,InsertEnter * call localspec#noted(0)
  autocmd BufLeave,BufWritePost * call localspec#left()
  autocmd BufReadPost,BufWritePost,CursorHold * call localspec#ghost#rest(1)
  autocmd CursorHold,CursorHoldI * call localspec#rests()
augroup END
